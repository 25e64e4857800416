"""Memory that the GPUs of one host share, and collectives in it, with the bits of NCCL's or gloo's."""
