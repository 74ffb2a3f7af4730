"""What a run's processes import at their start: seconds that every run of an experiment pays, one process after the other."""

import subprocess
import sys


def test_the_driver_pays_for_no_model_code():
    """torch and Ray are a second; transformers, FSDP2 and vLLM are five, and only actors need them."""
    program = (
        "import sys, molt_core.train.__main__\n"
        "print(*{'transformers', 'vllm', 'torch.distributed.fsdp', 'torch._dynamo'} & sys.modules.keys())"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []
