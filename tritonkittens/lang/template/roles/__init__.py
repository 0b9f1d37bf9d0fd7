"""The roles of a template, a file each. `kernel.py` lists which a template has; a role that issues MMAs for chips with
tensor memory would stand here too."""
