"""``do=export``: a trained backbone of a run as plain timm weights, for use without this library."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save

from split_core.config import RunConfig
from split_core.engine.deploy import deployed
from split_core.engine.methods import plan
from split_core.engine.opening import open_run
from split_core.errors import SplitError, unknown
from split_core.files import write_whole


def main(config: RunConfig) -> Path:
    """Write the timm state dict of export.method (the run's own policy by default) to export.out.

    The pyramid's own layers, the task's auxiliary layers and the policy are not part of a timm model and stay out. So
    do windows, which timm's blocks do not know; the file's metadata has them.

    Raises:
        SplitError: no such method in the run, its weights are missing, or export.out exists.
    """
    with open_run(config) as session:
        methods = {method.name: method for method in plan(config)}
        name = config.export.method or config.policy["name"]
        if name not in methods:
            raise SplitError(f"export.method={name}: {unknown('method of this run', name, methods)}")
        out = Path(config.export.out or session.run_dir / "export" / f"{name}.safetensors")
        if out.exists():
            raise SplitError(f"export.out={out} exists; choose another, or delete it")
        model = deployed(session, methods[name]).model
        vit = model.unwrap()
        state = {key: value.contiguous().cpu() for key, value in vit.state_dict().items()}
        facts = {"run": session.run_dir.name, "model": str(config.model), "source": methods[name].source}
        facts |= {} if model.windows is None else {"windows": str(model.windows)}
        write_whole(out, save(state, metadata=facts))
    print(out)
    return out
