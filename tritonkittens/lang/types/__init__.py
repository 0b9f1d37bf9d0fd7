"""Tile types: register, shared, tensor-memory and global tiles, and swizzles."""
