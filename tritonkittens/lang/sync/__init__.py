"""Semaphores (mbarriers), pipelines, named barriers, clusters, warp roles."""
