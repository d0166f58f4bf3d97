"""The pure cores: no IO, clock, randomness, logging or torch. Each takes events and returns effects."""
