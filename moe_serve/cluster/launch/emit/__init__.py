"""Writes files that start a launch with Slurm, Kubernetes, systemd, or a shell."""
