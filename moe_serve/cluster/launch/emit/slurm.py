"""Writes a batch script for Slurm: `sbatch NAME.sbatch`.

The script runs one task on each node, with all of its CPUs; the tasks find each other by Slurm's
variables. Without a secret in the environment of sbatch the job makes its own, which exists only in
the job's environment.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from moe_serve.cluster.launch.emit.deployment import Deployment

_SCRIPT = """\
#!/usr/bin/env bash
# {name} on {num_nodes} nodes: sbatch {name}.sbatch
#
# Clients reach the first node of the job on port {http_port}: squeue --me, or the top of the log.
# To end it: scancel --signal=TERM JOB, which drains; scancel alone kills what is not done after
# the cluster's KillWait (30 s). At its time limit the job drains too, by --signal.
#SBATCH --job-name={name}
#SBATCH --nodes={num_nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=TERM@{stop}
{gpus}#SBATCH --output={name}-%j.log
set -euo pipefail

# Every node inherits the secret of the control connections, which is in no file or argument.
if [ -z "${{MOE_SERVE_CLUSTER_SECRET:-}}" ]; then
  MOE_SERVE_CLUSTER_SECRET="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
fi
export MOE_SERVE_CLUSTER_SECRET
{exports}
echo "job $SLURM_JOB_ID: node 0 is the first of $SLURM_JOB_NODELIST"

# srun does not pass on the CPUs of sbatch; without the count a task would get one core.
exec srun --nodes={num_nodes} --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" \\
  --kill-on-bad-exit=1 --label \\
  {command}
"""


def slurm_files(deployment: Deployment) -> Mapping[str, str]:
    """Returns {file name: text}."""
    gpus = deployment.num_devices
    exports = [
        f"export {name}={shlex.quote(value)}" for name, value in deployment.variables.items()
    ]
    text = _SCRIPT.format(
        name=deployment.name,
        num_nodes=deployment.num_nodes,
        http_port=deployment.http_port,
        stop=deployment.stop_timeout_s,
        gpus=f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
        exports="".join(f"{line}\n" for line in exports),
        command=shlex.join(("moe-serve", *deployment.command.arguments())),
    )
    return {f"{deployment.name}.sbatch": text}
