"""Data plane: tensors, the model, the KV pool."""

import logging

# transformers imports torchao where it is installed, and that warns about parts of it which are not
# for this machine, and about torch, each time; none of these is used here.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
