"""Ready files for what starts processes on clusters: Slurm, Kubernetes, systemd, or a shell."""
