"""Facts about checkpoints: save stages, saves across ranks, stalls, loads, planning inputs."""
