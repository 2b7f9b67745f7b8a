"""The operators of domain `dspark`: their meaning in standard ONNX, and their kernels."""
