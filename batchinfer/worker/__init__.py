"""The part of the engine that holds tensors: the model, the KV pool and the sampler.

``loader`` loads a model, using ``model``, ``lora`` and ``fusion``. ``model_runner`` runs the
model's steps: a ``forward`` pass (``attention``, ``cuda_graphs``), then ``sampling``.
"""

import logging

# transformers imports torchao if it is installed. torchao then warns about the torch version and
# about its own features that do not work on this machine. batchinfer does not use these features.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
