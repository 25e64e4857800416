"""Scale, mask, softmax and dropout of attention scores in one CUDA C++ kernel, compiled on first use."""
