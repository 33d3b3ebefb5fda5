"""What every package may use: fields and schemas, registries, names, devices, random streams."""
