"""Triton's interpreter, which runs kernels on a CPU where TRITON_INTERPRET=1."""


def let_kernels_loop() -> None:
    """Let kernels have loops: NumPy from 2.4 on makes no number of an array of one element, as the interpreter expects
    of their bounds."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_index
