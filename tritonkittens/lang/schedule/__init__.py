"""Tile schedulers and raster orders: which tile a CTA computes next."""
