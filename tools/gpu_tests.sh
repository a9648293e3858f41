#!/usr/bin/env bash
# Run the GPU tests without a network, from a folder that tools/gpu_wheels.sh has filled, and write a report:
#
#     gpu_tests.sh [FOLDER] [PYTHON]
#
# FOLDER is by default where this script lies, PYTHON is python3. The report is FOLDER/report.txt. Exits with pytest's
# code: 0 if all tests passed, also if all were skipped because there is no GPU; the report's last lines tell.
set -euo pipefail
folder=$(cd "${1:-$(dirname "$0")}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${2:-python3}" -m venv "$work/venv"
# shellcheck disable=SC1091
source "$work/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 MPLCONFIGDIR="$work/matplotlib"
pip install --quiet --no-index --find-links "$folder/wheels" --requirement "$folder/requirements.txt"
mkdir "$work/source"
tar -xzf "$folder/source.tar.gz" -C "$work/source"
cd "$work/source"

run() {
    echo "+ $*"
    "$@" 2>&1 || echo "(exit code $?)"
    echo
}

{
    run date
    run nvidia-smi
    run pip list --format=freeze
    run simparallel doctor
    echo "+ pytest -m gpu"
} > "$folder/report.txt"
code=0
pytest -m gpu --tb=short 2>&1 | tee -a "$folder/report.txt" || code=$?
echo "The report: $folder/report.txt"
exit "$code"
