"""The part of the engine that holds tensors: the model, the KV pool and the sampler.

``loader`` loads a model, using ``model``, ``lora`` and ``fusion``. ``model_runner`` runs the
model's steps: a ``forward`` pass (``attention``, ``cuda_graphs``), then ``sampling``.
"""

import logging

# transformers imports torchao if it is installed. torchao then warns about torch, and about parts
# of torchao that do not work on this machine. This package does not use these parts.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
