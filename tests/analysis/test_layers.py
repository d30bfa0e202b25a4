"""What the package may import."""

import subprocess
import sys


def test_importing_the_analysis_imports_neither_engines_nor_upper_layers() -> None:
    barred = {"ray", "torch", "vllm", "mlflow", "matplotlib.pyplot", "workers", "orchestrator"}
    code = f"import sys, analysis; print(sorted({barred!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
