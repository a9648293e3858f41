#!/usr/bin/env bash
# Check a machine with a GPU, without a network and without installing anything:
#
#     tools/gpu_check.sh [OUT]
#
# It takes python3 (or PYTHON) with the CuPy, PyTorch and pytest that it finds, and this checkout. Eight minutes at most,
# each part within its own limit. Everything goes into OUT (gpu_check by default), its last 40 lines into
# OUT/summary.txt. Exits with 1 if a part failed or was stopped, with 0 otherwise, also if parts were skipped.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-gpu_check}
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
cd "$root" || exit 2
python=${PYTHON:-python3}
# What runs meanwhile stays inside of OUT.
export PYTHONPATH="$root:$root/tests${PYTHONPATH:+:$PYTHONPATH}" XDG_CONFIG_HOME="$out/config" \
    MPLCONFIGDIR="$out/config/matplotlib" PYTHONDONTWRITEBYTECODE=1
summary=$out/summary.txt
: > "$summary"
failed=0

# say NAME TEXT: a line of the summary.
say() {
    printf '%-12s%s\n' "$1" "$2" | cut -c 1-220 | tee -a "$summary"
}

# part NAME SECONDS COMMAND...: run it within its limit, with its output in OUT/NAME.txt.
part() {
    local name=$1 limit=$2 start=$SECONDS code=0
    shift 2
    # An interrupted pytest still tells its failures.
    timeout --signal=INT --kill-after=8 "$limit" "$@" > "$out/$name.txt" 2>&1 < /dev/null || code=$?
    case $code in
        0) say "$name" "done in $((SECONDS - start)) s" ;;
        124 | 137) failed=1 && say "$name" "STOPPED after its limit of $limit s" ;;
        *) failed=1 && say "$name" "FAILED with exit code $code: $(grep -v '^[[:space:]]*$' "$out/$name.txt" | tail -n 1)" ;;
    esac
    return "$code"
}

# lines NAME COUNT: the lines of a part that belong to the summary.
lines() {
    sed -n 's/^\* /  /p' "$out/$1.txt" | head -n "$2" | cut -c 1-220 | tee -a "$summary"
}

say machine "$(date -u +%FT%TZ), commit $(git rev-parse --short HEAD 2> /dev/null || echo unknown), $(nproc) cores"
gpus=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2> /dev/null | sort | uniq -c | head -n 2 | paste -sd ' ')
say gpu "${gpus:-nvidia-smi finds none}"
say versions "$("$python" - 2>&1 << 'END' | tail -n 1
import importlib.metadata as metadata, platform

names = "numpy", "cupy-cuda12x", "cupy-cuda13x", "torch", "pytest", "pytest-xdist", "hypothesis"
found = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
print("Python", platform.python_version(), *(f"{name} {found[name]}" for name in names if name in found))
END
)"
part doctor 20 "$python" -m simparallel doctor
reason=$("$python" -c "from simparallel.backend import why_no_gpu; print(why_no_gpu())" 2>&1 | tail -n 1)
stand_in=${SIMPARALLEL_STAND_IN:-}

if [ -z "$reason" ] || [ -n "$stand_in" ]; then
    for name in captured ranks where; do
        part "$name" 40 "$python" tools/gpu_programs.py "$name"
        lines "$name" 4
    done
else
    say programs "skipped: $reason"
fi

if [ -n "$stand_in" ]; then
    reason="a stand-in computes, $stand_in"
fi
if [ -n "$reason" ]; then
    say tests "skipped: $reason"
    say calibration "skipped: $reason"
    say steps "skipped: $reason"
else
    if missing=$("$python" -c "import cloudpickle, hypothesis, pytest, pytest_timeout, xdist" 2>&1); then
        part tests 150 "$python" -m pytest -m gpu -n "$(nproc)" -q --tb=short --ignore=tests/docs
        grep -E '^(FAILED|ERROR) ' "$out/tests.txt" | head -n 8 | cut -c 1-160 | tee -a "$summary"
        grep -E '[0-9]+ (passed|failed|skipped|error)' "$out/tests.txt" | tail -n 1 | tee -a "$summary"
    else
        say tests "skipped: $(tail -n 1 <<< "$missing")"
    fi
    part calibration 95 "$python" -m simparallel calibrate --array cupy
    grep -A 3 'left out of the fit' "$out/calibration.txt" | tee -a "$summary"
    part steps 75 "$python" tools/gpu_programs.py steps
    lines steps 4
fi
rm -rf "$out/config"

echo
echo "$summary, $SECONDS s in all:"
cat "$summary"
exit "$failed"
