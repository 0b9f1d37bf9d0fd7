"""Tile schedulers and raster orders: which tile a thread block computes next."""
