import click


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("run")
@click.argument("out")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def look(obj, run, out, overrides):
    """Write what RUN's model computes to OUT."""
    obj.start_ranks()

    import torch

    import forge_plugins_interp as interp
    from acme_recipes.reversal import Reversal

    tokens = torch.arange(64).view(4, 16)
    with interp.open(run, overrides) as session, torch.no_grad():
        with session.observe("blocks.*.*", "logits") as plain:
            session.model(tokens)
        changes = [Reversal("blocks.0.z", at={"head": 3}), Reversal("blocks.1.attn_out", at={"position": -1})]
        with session.intervene(*changes), session.observe("logits") as changed:
            session.model(tokens)
        if session.context.mesh.rank == 0:
            torch.save({**plain, "changed": changed["logits"]}, out)
