"""The load / compute / finish templates."""
