#!/bin/bash
# Eight devices. DATA_PATH holds the files of MNIST; `python examples/make_data.py data` writes some of the same format.
set -e
cd "$(dirname "$0")"
export DATA_PATH=${DATA_PATH:-$(realpath ../../data/MNIST)}
simparallel msrun --worker_num=8 --local_worker_num=8 --master_port=8118 \
    --log_dir="${LOG_DIR:-advanced_log_output}" --join=True --cluster_time_out=300 advanced_distributed_operator_parallel.py
