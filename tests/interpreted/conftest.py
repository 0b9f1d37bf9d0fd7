"""These tests run in Triton's interpreter: in processes of their own, which tests/test_interpreted.py starts. Any other
process passes over them.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
