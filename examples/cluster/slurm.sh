#!/usr/bin/env bash
# Starts Ray on the nodes of a SLURM job and trains; submitted again with the same OUTPUT, it goes on from the last checkpoint.
#
#   VENV=/shared/cluster OUTPUT=/shared/runs/first sbatch examples/cluster/slurm.sh
#
# VENV and OUTPUT lie on a file system that every node sees (see docs/cluster.md). Extra arguments are settings: sbatch slurm.sh run.steps=10
#SBATCH --job-name=experiential
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
set -euo pipefail
: "${VENV:?Expected VENV, the environment with experiential-rl, on a file system that every node sees}"
: "${OUTPUT:?Expected OUTPUT, the folder of the run, on a file system that every node sees}"
RECIPE=${RECIPE:-complementary-7b}
PORT=${PORT:-6379}
GPUS=${SLURM_GPUS_ON_NODE:-8}
CPUS=${SLURM_CPUS_PER_TASK:-64}
export PATH="$VENV/bin:$PATH" RAY_USAGE_STATS_ENABLED=0

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
ip=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
address=$ip:$PORT
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

echo "Ray's head node: $head ($address)"
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
    ray start --head --node-ip-address="$ip" --port="$PORT" --num-gpus="$GPUS" --num-cpus="$CPUS" --block &
started=$!
for _ in $(seq 60); do
    sleep 5
    if ! kill -0 "$started" 2>/dev/null; then  # another program may have the port, even another Ray
        echo "Expected Ray to start at $address, got an end; set PORT if its output above says that the port is taken" >&2
        exit 1
    fi
    ray status --address "$address" >/dev/null 2>&1 && break
done

workers=$((${#nodes[@]} - 1))
if [ "$workers" -gt 0 ]; then
    srun --nodes="$workers" --ntasks="$workers" --exclude="$head" --overlap \
        ray start --address="$address" --num-gpus="$GPUS" --num-cpus="$CPUS" --block &
fi
python - "$address" "${#nodes[@]}" <<'PYTHON'
import sys, time
import ray

address, wanted = sys.argv[1], int(sys.argv[2])
ray.init(address=address, log_to_driver=False)
for _ in range(120):
    found = sum(node["Alive"] for node in ray.nodes())
    if found >= wanted:
        print(f"{found} nodes, {ray.cluster_resources().get('GPU', 0):.0f} GPUs", flush=True)
        break
    time.sleep(5)
else:
    sys.exit(f"Expected {wanted} nodes after ten minutes, got {found}; look at the output of the job's steps")
PYTHON

if [ -f "$OUTPUT/config.yaml" ]; then  # without a checkpoint, --resume begins again
    what=(--resume)
else
    what=(--recipe "$RECIPE")
fi
# 24 GPUs: eight train the actor and eight generate for it; four train the extractor and four generate for it.
code=0
experiential-train "${what[@]}" --output "$OUTPUT" --plain \
    "cluster.address=$address" \
    cluster.actor.gpus_per_node=8 cluster.actor.engines=8 \
    cluster.extractor.gpus_per_node=4 cluster.extractor.engines=4 \
    cluster.env_workers=6 "$@" || code=$?
# SLURM itself requeues a job only when a node fails. 2 is a wrong setting and 130 an interrupt, which would come again.
if [ "$code" -ne 0 ] && [ "$code" -ne 2 ] && [ "$code" -ne 130 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${REQUEUES:-10}" ]; then
    echo "training ended with exit code $code: the job goes back into the queue, to go on from the last checkpoint" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
