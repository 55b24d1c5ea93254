#!/usr/bin/env bash
# The kernel tests on processors that are not here, emulated by QEMU, without PyTorch. For Debian 12.
#   tests/emulated.sh prepare PYTHON   gets an arm64 Python with octavo's packages, and the tools to compile for it,
#                                      into build/aarch64; nothing outside of it changes
#   tests/emulated.sh aarch64          compiles the native module for 64-bit Arm and runs the tests there
#   tests/emulated.sh x86 PYTHON       runs a few on x86-64 without AVX, and with AVX2 only: no newer instruction may be met
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$PWD/build/aarch64 root=$PWD/build/aarch64/root
# The kernels' result may not depend on this machine's settings for its own BLAS; one thread, for cores are few.
unset OPENBLAS_CORETYPE OPENBLAS_L2_SIZE
export OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1

prepare() {
  for tool in aarch64-linux-gnu-g++ qemu-aarch64-static apt-get; do
    command -v $tool >/dev/null ||
      { echo "$tool is missing (Debian: apt install g++-aarch64-linux-gnu qemu-user-static)" >&2; exit 1; }
  done
  # apt with a state of its own, as if on an arm64 machine with nothing installed: the packages come with all they need.
  mkdir -p "$dir"/apt/{state,cache}/{lists,archives}/partial "$root"
  : > "$dir/apt/status"
  apt() {
    apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$dir/apt/state" -o Dir::Cache="$dir/apt/cache" \
      -o Dir::State::status="$dir/apt/status" -o Debug::NoLocking=true "$@"
  }
  apt update
  apt install --yes --no-install-recommends --download-only python3.11 libpython3.11-dev libstdc++6 >/dev/null
  for package in "$dir"/apt/cache/archives/*.deb; do dpkg --extract "$package" "$root"; done
  "$1" -m venv "$dir/tools"
  local pip=("$dir/tools/bin/python" -m pip --disable-pip-version-check -qq install)
  "${pip[@]}" cmake ninja nanobind
  "$1" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' > "$dir/requirements.txt"
  "${pip[@]}" --target "$dir/packages" --upgrade --only-binary=:all: --python-version 311 --platform manylinux2014_aarch64 \
    --platform manylinux_2_28_aarch64 --requirement "$dir/requirements.txt" gguf pytest pytest-timeout
}

aarch64() {
  PATH=$dir/tools/bin:$PATH
  cmake -S . -B "$dir/native" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CXX_FLAGS="-idirafter $root/usr/include" \
    -DPython_EXECUTABLE="$dir/tools/bin/python" -DPython_INCLUDE_DIR="$root/usr/include/python3.11" \
    -DNB_SUFFIX=.cpython-311-aarch64-linux-gnu.so > "$dir/cmake.log" || { tail -20 "$dir/cmake.log"; exit 1; }
  ninja -C "$dir/native" > "$dir/ninja.log" || { tail -40 "$dir/ninja.log"; exit 1; }
  rm -rf "$dir/site"
  mkdir "$dir/site"
  cp -r src/octavo "$dir/site"
  rm -f "$dir"/site/octavo/backends/cpu/*.so
  cp "$dir"/native/_native*.so "$dir/site/octavo/backends/cpu"
  # CXX: the sampling tests compile the kernel by themselves. Left out: the test of what happens when the system refuses
  # memory, for QEMU grants what the limit forbids; and most of attention's cases of a thousand steps, ten seconds each here.
  local left_out='what_the_system_does_not_give or overflow_the_partial_slots or costs_no_bits'
  left_out+=' or (ragged_steps and not 2-1-40-32) or (windows_and_softcaps and not windows1)'
  left_out+=' or (bits_do_not_depend_on_chunks and not bfloat16)'
  PYTHONPATH=$dir/site:$dir/packages CXX=aarch64-linux-gnu-g++ \
    qemu-aarch64-static -L "$root" "$root/usr/bin/python3.11" -m pytest -p no:cacheprovider \
    -k "not ($left_out)" \
    tests/backends tests/runner/test_sampling_kernel.py
}

x86() {
  for processor in Nehalem Haswell; do
    qemu-x86_64-static -cpu $processor "$1" -m pytest -p no:cacheprovider tests/backends/test_operations.py -k 'forced or norm' 2>&1 |
      grep -v "TCG doesn't support"
  done
}

"$@"
