"""`specactor serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from specactor_ray.cli.options import ConfigFile, Overrides, load_settings
from specactor_ray.core.errors import EXIT_INTERRUPTED, InputError


def serve(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen at; any but loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 8000,
    model_name: Annotated[
        str | None, typer.Option(help="Name of the model for clients. Default: target.model.", show_default=False)
    ] = None,
) -> None:
    """Serve the target over HTTP: the endpoints of OpenAI, and those of vLLM that trainers use.

    The token of clients is read from SPECACTOR_API_KEY, or from the file that SPECACTOR_API_KEY_PATH names.
    Ctrl-C and SIGTERM let open requests end for some seconds, then end the run.
    """
    settings, progress = load_settings(config_file, overrides)
    try:
        from specactor_ray.serve.run import serve as run_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "starlette", "uvicorn", "pydantic"):
            raise
        raise InputError(
            f"{error.name} is not installed; install it: pip install fastapi uvicorn prometheus-client"
        ) from None
    try:
        run_server(settings, host, port, model_name, progress)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
