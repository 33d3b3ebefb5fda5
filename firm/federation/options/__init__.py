"""Options of federations, one file each; see ``firm.federation.option``."""
