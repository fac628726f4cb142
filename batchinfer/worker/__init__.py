"""Data plane: tensors, the model, the KV pool.

``loader`` loads a model (``model``, ``lora``, ``fusion``), ``model_runner`` runs steps on it:
``forward`` (``attention``, ``cuda_graphs``) and ``sampling``.
"""

import logging

# transformers imports torchao where it is installed, and that warns about parts of it which are not
# for this machine, and about torch, each time; none of these is used here.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
