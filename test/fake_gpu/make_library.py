"""Build libfakecuda.so and libcuda.so.1 from runtime.cpp, collectives.cpp and stubs for what the installed torch asks for.

    python test/fake_gpu/make_library.py FOLDER

It needs g++, nm, and the CUDA build of torch in the running environment.
"""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
# the names of the libraries that need a GPU
WANTED = re.compile(r"(__cuda|cuda|cublas|cudnn|nccl|cusparse|cusolver|curand|cufft|cufile)[A-Z_]\w*$")
DRIVER = re.compile(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(")
# names that the header defines again for a later version of the function
VERSIONED = re.compile(r"#define\s+(cu[A-Z]\w+)\s+(?:__CUDA_API_PTSZ\(|__CUDA_API_PTDS\()?(cu[A-Z]\w+_v\d+)")
SET_BY_DRIVER = {
    "cuDeviceGetCount": '(int *count) { *count = getenv("FAKE_CUDA_DEVICES") ? atoi(getenv("FAKE_CUDA_DEVICES")) : 1; return 0; }',
    "cuDriverGetVersion": "(int *version) { *version = 13000; return 0; }",
    "cuCtxGetCurrent": "(void **context) { *context = (void *)16; return 0; }",
    "cuDeviceGet": "(int *device, int number) { *device = number; return 0; }",
    "cuDeviceGetAttribute": "(int *value) { *value = 1; return 0; }",
    "cuGetErrorString": '(int error, const char **text) { *text = "an error of the fake driver"; return 0; }',
}


def undefined(library):
    """The names that `library` expects from others."""
    lines = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True
    ).stdout.splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    torch = Path(find_spec("torch").origin).parent
    site = torch.parent
    folders = [
        *site.glob("nvidia/**/include"),
        site / "triton/backends/nvidia/include",
    ]  # the last has crt/host_defines.h
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    for name in (
        "cuda_fp16.h",
        "cuda_bf16.h",
        "cuda_fp8.h",
    ):  # nccl.h includes them, uses nothing of them, and torch lacks theirs
        (empty / name).touch()
    includes = [f"-I{path}" for path in (empty, *folders)]
    objects, ours = [], set()
    for name in ("runtime", "collectives"):
        target = folder / f"{name}.o"
        source = HERE / f"{name}.cpp"
        subprocess.run(["g++", "-std=c++17", "-O2", "-fPIC", "-w", *includes, "-c", source, "-o", target], check=True)
        objects.append(target)
        listed = subprocess.run(["nm", "--defined-only", target], capture_output=True, text=True, check=True).stdout
        ours |= {line.split()[-1] for line in listed.splitlines()}
    asked = set().union(*(undefined(path) for path in [*torch.glob("lib/*.so"), *site.glob("nvidia/**/lib/*.so*")]))
    stubs = sorted(name for name in asked if WANTED.match(name) and name not in ours)
    source = folder / "stubs.c"
    source.write_text("".join(f"int {name}() {{ return 0; }}\n" for name in stubs))
    subprocess.run(["gcc", "-O1", "-fPIC", "-w", "-c", source, "-o", folder / "stubs.o"], check=True)
    subprocess.run(
        ["g++", "-shared", *objects, folder / "stubs.o", "-o", folder / "libfakecuda.so", "-lrt", "-lpthread"],
        check=True,
    )
    header = next(site.glob("nvidia/**/include/cuda.h")).read_text()
    names = set(DRIVER.findall(header)) | {later for _, later in VERSIONED.findall(header)}
    driver = folder / "driver.c"
    own = SET_BY_DRIVER | {f"{name}_v2": body for name, body in SET_BY_DRIVER.items()}
    lines = [f"int {name}{own.get(name, '() { return 0; }')}\n" for name in sorted(names | set(SET_BY_DRIVER))]
    driver.write_text("#include <stdlib.h>\n" + "".join(lines))
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", driver, "-o", folder / "libcuda.so.1"], check=True)
    print(f"{len(stubs)} stubs, {len(lines)} functions of the driver, in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
