"""Movement of tiles between registers, shared, tensor and global memory."""
