"""What the command `python -m blockres.train` is made of."""

from importlib.util import find_spec

_missing = [name for name in ("tyro", "tqdm", "numpy", "safetensors") if find_spec(name) is None]
if _missing:
    raise ModuleNotFoundError(f"blockres.training needs {', '.join(_missing)}: pip install 'blockres[train]'")
