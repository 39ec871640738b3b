"""Properties of FX graphs that every pass needs: roles, storages, process groups, source lines."""
