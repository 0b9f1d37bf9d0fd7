"""The kernels of softmax and of the losses."""
