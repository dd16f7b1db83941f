"""transformers imports these names together with the kernels. The trainer gives attention no mask, so none is called."""


def pad_input(*_):
    raise AssertionError("attention has no mask here")


unpad_input = pad_input
