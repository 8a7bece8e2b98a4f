"""Measurements of blockres, beside the textbook formula and other packages (`pip install -e '.[bench]'`).

pytest bench --benchmark-only        times of operations and stacks (options: bench/conftest.py)
python -m bench.device               everything on a GPU, in one run
python -m bench.cpu                  one aggregation on a CPU, side by side
python -m bench.stack                bytes of a whole training stack, counted without a GPU
python -m bench.traffic              bytes of single calls
python -m bench.resources            registers, spills and access widths, compiled for GPUs that are not here
python -m bench.peer_resources       the same for other packages
python -m bench.pipeline             the pipeline, measured and simulated
python -m bench.pipeline_memory      what a pipeline holds, beside PyTorch's own stage
python -m bench.huggingface          a training step of a Hugging Face model
python -m bench.learning             how the residuals learn
python -m bench.compare              what has changed since a stored run
python -m bench.report               tables and plots of all that was saved
"""
