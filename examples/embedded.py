"""The engine client in a program of your own, without HTTP: `python examples/embedded.py [MODEL [torch|simulated]]`.

Starts two ranks as local processes, asks both at once, streams one answer and leaves another half-way.
"""

from __future__ import annotations

import asyncio
import sys

from gateway import AsyncLLM, GatewayConfig, SamplingParams
from gateway.config import EngineConfig, ParallelConfig
from gateway.sampling_params import RequestOutputKind


async def main(model: str, engine: str) -> None:
    config = GatewayConfig(
        engine=EngineConfig(model=model, engine=engine, max_model_len=1024, max_num_seqs=16, num_kv_blocks=256),
        parallel=ParallelConfig(data_parallel_size=2, data_parallel_backend="mp"),
    )
    llm = await AsyncLLM.from_config(config)
    try:
        stream = SamplingParams(max_tokens=24, temperature=0, output_kind=RequestOutputKind.DELTA)
        async for output in llm.generate("The capital of France is", stream, "streamed"):
            print(output.outputs[0].text, end="", flush=True)
        print()

        whole = SamplingParams(max_tokens=8, temperature=0, output_kind=RequestOutputKind.FINAL_ONLY)
        prompts = ["One, two, three,", "Red, green,", "Monday, Tuesday,", "A, B, C,"]
        await asyncio.gather(*(print_answer(llm, prompt, whole) for prompt in prompts))

        # Leaving the stream aborts the request in its engine.
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=500), "left"):
            if len(output.outputs[0].token_ids) >= 5:
                break
        print({f"rank {rank.rank}": rank.requests_total for rank in llm.status().ranks})
    finally:
        await llm.shutdown()


async def print_answer(llm: AsyncLLM, prompt: str, params: SamplingParams) -> None:
    async for output in llm.generate(prompt, params, prompt):
        print(f"{prompt!r} → {output.outputs[0].text!r} (rank {output.rank})")


if __name__ == "__main__":
    arguments = sys.argv[1:] + ["smollm2", "torch"][len(sys.argv) - 1 :]
    asyncio.run(main(*arguments))
