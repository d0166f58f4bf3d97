"""The production cores under a virtual clock: what a service would do, on hardware that need not be there."""
