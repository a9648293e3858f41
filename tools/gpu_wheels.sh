#!/usr/bin/env bash
# Collect all that the GPU tests need, for a machine with a GPU and without a network:
#
#     tools/gpu_wheels.sh FOLDER [cuda12|cuda13] [--python 3.12] [--no-cuda-libraries] [--nccl]
#
# Then copy FOLDER to that machine, and run FOLDER/gpu_tests.sh there.
#
# --python: the version of Python there (default: the one here); its processor is x86_64, as here.
# --no-cuda-libraries: leave out the CUDA libraries that CuPy loads, about 1.6 GB, if a CUDA toolkit is installed there.
# --nccl: add NCCL, 0.35 GB, for a machine with several GPUs.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

folder="" cuda=cuda12 version="" libraries='[ctk]' nccl=""
while [ $# -gt 0 ]; do
    case "$1" in
        cuda12 | cuda13) cuda=$1 ;;
        --python) version=${2:-} && [ -n "$version" ] && shift || usage ;;
        --no-cuda-libraries) libraries="" ;;
        --nccl) nccl=yes ;;
        -*) usage ;;
        *) [ -z "$folder" ] && folder=$1 || usage ;;
    esac
    shift
done
[ -n "$folder" ] || usage

mkdir -p "$folder/wheels"
folder=$(cd "$folder" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check --quiet)
"${pip[@]}" install --upgrade pip # old ones do not know all names of platforms

# The tests, as they are here: tracked files and new ones.
git ls-files --cached --others --exclude-standard -z | tar --null --files-from=- --ignore-failed-read -czf "$folder/source.tar.gz"
cp tools/gpu_tests.sh "$folder/"

rm -f "$folder"/wheels/simparallel-*.whl
mkdir "$work/source"
tar -xzf "$folder/source.tar.gz" -C "$work/source"
"${pip[@]}" wheel --no-deps --wheel-dir "$folder/wheels" "$work/source"
printf '%s\n' "simparallel[test,$cuda]" "cupy-${cuda}x$libraries" ${nccl:+"nvidia-nccl-cu${cuda#cuda}"} > "$folder/requirements.txt"

options=(--only-binary=:all:)
if [ -n "$version" ]; then
    options+=(--python-version "$version")
    for tag in manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux_2_12 \
        manylinux2010 manylinux_2_5 manylinux1 linux; do
        options+=(--platform "${tag}_x86_64")
    done
fi
"${pip[@]}" download "${options[@]}" --find-links "$folder/wheels" --dest "$folder/wheels" --requirement "$folder/requirements.txt"

echo "$folder: $(find "$folder/wheels" -name '*.whl' | wc -l) wheels, $(du -sh "$folder" | cut -f1) in all; the largest:"
du -m "$folder"/wheels/* | sort -rn | head -5 | sed "s|$folder/wheels/||; s|^|    |; s|\t| MB  |"
