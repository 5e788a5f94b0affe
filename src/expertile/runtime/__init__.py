"""A Plan and tensors -> the result; the device; time."""
