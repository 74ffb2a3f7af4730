"""What vLLM loads in each of its processes (entry point ``vllm.general_plugins``): our weight transfer, by name.

Importing this module imports ``molt_core`` and thereby its torchvision hook. Light and idempotent: it runs everywhere.
"""

BACKEND = "molt_bucket"


def register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "molt_core.rollout.vllm_receiver", "BucketReceiver"
        )
