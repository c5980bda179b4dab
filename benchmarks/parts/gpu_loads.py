"""Pack vLLM and Ray into two small archives: the parts that a dense bfloat16 model on one Hopper card needs.

    python benchmarks/parts/gpu_loads.py WHEELS OUT     # WHEELS: a folder of wheels; writes OUT/vllm.tar.xz and OUT/ray.tar.xz

CUDA libraries contain every kernel once per GPU architecture ("fat binaries"). The code for architectures other than Hopper is
zeroed, which xz compresses to nothing, and so are symbol tables, which only debuggers read. Offsets stay the same.
"""

from __future__ import annotations

import lzma
import re
import struct
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ARCH = 90
PTX, CUBIN = 1, 2
OTHER_ARCH = 75
"""Architecture written into zeroed entries, so that the driver reports a missing kernel instead of running zeros."""
CONTAINER = struct.pack("<IHH", 0xBA55ED50, 1, 16)
# Kept attention kernels: bfloat16, head sizes 64 and 128, no soft cap, as in Llama and Qwen.
HEAD = re.compile(rb"ELi(\d+)ENS\w{0,3}_10bfloat16_tE\w+?Sm90E(?:Lb[01]E){2}Lb([01])E")

FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
LEFT_OUT = re.compile(
    r"vllm/(vllm-rs|third_party/(deep_gemm|fmha_sm100|tml_fa4)/|benchmarks/|_flashmla|_qutlass_C|_rust_tool_parser"
    r"|vllm_flash_attn/_vllm_fa2_C|vllm_flash_attn/cute/|.*/configs/E=|.*/configs/N=)"
    r"|ray/(jars|rllib|tune|serve|llm|train|data|dashboard/client|core/generated/.*\.pyi)"
    r"|.*\.(map|pyi|h|hpp|cuh|cu|js|css|pyx|pxd)$|[^/]+\.data/(?!purelib|platlib|scripts)|.*/tests?/"
    r"|mistral_common/data/|pycountry/locales/|tvm_ffi/(3rdparty|src|share)/"
)
KEPT = re.compile(r"ray/(train|tune|serve|llm|rllib|data)/(__init__|constants)\.py$")


def slim(data: bytearray) -> None:
    """Zero the symbol tables and unused kernels of an ELF file."""
    for name, flags, start, size in _sections(data):
        if name in (".symtab", ".strtab", ".comment") or name.startswith(".debug"):
            if not flags & 2:  # not loaded into memory
                data[start : start + size] = bytes(size)
        elif name == ".nv_fatbin":
            _zero_kernels(data, start, start + size)


def _zero_kernels(data: bytearray, start: int, stop: int) -> None:
    while (start := data.find(CONTAINER, start, stop)) >= 0:
        end = start + 16 + struct.unpack_from("<Q", data, start + 8)[0]
        heads = HEAD.findall(data[start:end])
        unused = bool(heads) and not any(size in (b"64", b"128") and cap == b"0" for size, cap in heads)
        unused |= not heads and b"FlashAttnFwdSm90" in data[start:end]  # another dtype
        entry = start + 16
        while entry < end:
            kind, _, head, size = struct.unpack_from("<HHIQ", data, entry)
            arch = struct.unpack_from("<I", data, entry + 28)[0]
            if (kind, arch) != (CUBIN, ARCH) or unused:
                struct.pack_into("<H", data, entry, CUBIN)
                struct.pack_into("<I", data, entry + 28, OTHER_ARCH)
                data[entry + head : entry + head + size] = bytes(size)
            entry += head + size
        start = end


def _sections(data: bytearray) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, flags, first byte and size of each section."""
    table = struct.unpack_from("<Q", data, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", data, table + row * size) for row in range(count)]
    for name, kind, flags, _, start, length in rows:
        first = rows[names][4] + name
        if kind != 8:  # .bss has no bytes
            yield data[first : data.index(0, first)].decode(), flags, start, length


def unpack(wheel: Path, site: Path) -> None:
    """Extract the needed files of a wheel, slimmed."""
    with zipfile.ZipFile(wheel) as file:
        for entry in file.infolist():
            name = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", entry.filename)
            if entry.is_dir() or (LEFT_OUT.match(name) and not KEPT.match(name)):
                continue
            data = bytearray(file.read(entry))
            if data[:5] == b"\x7fELF\x02":
                slim(data)
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_bytes(data)
            (site / name).chmod(0o755 if entry.external_attr >> 16 & 0o100 else 0o644)


def main() -> None:
    wheels, out = Path(sys.argv[1]), Path(sys.argv[2])
    for name in ("vllm", "ray"):
        with tempfile.TemporaryDirectory(dir=out) as site, lzma.open(out / f"{name}.tar.xz", "wb", filters=FILTERS) as packed:
            for wheel in sorted(wheels.glob("*.whl")):
                if wheel.name.startswith("vllm-") == (name == "vllm"):
                    unpack(wheel, Path(site))
            with tarfile.open(fileobj=packed, mode="w|") as tar:
                for path in sorted(Path(site).iterdir()):
                    tar.add(path, arcname=path.name)


if __name__ == "__main__":
    main()
