"""What is left out of imports, and only there."""

import subprocess
import sys
from pathlib import Path

from tests.tiny_models import make_model

PROGRAM = """
import sys
from orchestrator.control.data import load_tokenizer
from workers.lean_imports import UNUSED
from workers.policy import load_policy

tokenizer, _ = load_tokenizer(sys.argv[1])
tokenizer.encode("1+2=")
load_policy(sys.argv[1])
print([name for name in UNUSED if name in sys.modules])
import scipy.special
print(float(scipy.special.expit(0.0)))
"""


def test_models_and_tokenizers_come_without_scipy_which_can_be_imported_afterwards(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", tied=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == ["[]", "0.5"], done.stderr
