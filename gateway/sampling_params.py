"""Re-exported from the leaf that the engine core shares."""

from cores.sampling_params import InvalidParameterError, RequestOutputKind, SamplingParams

__all__ = ["InvalidParameterError", "RequestOutputKind", "SamplingParams"]
