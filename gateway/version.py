"""The one place where the version stands; packaging and every process read it here."""

__version__ = "0.1.0"
