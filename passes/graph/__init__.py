"""What every pass needs to know about FX graphs: roles, storages, FLOPs, source lines, minimum
cuts."""
