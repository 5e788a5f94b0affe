"""`expertile watch` and `expertile cache` as the command line has them, wherever they are registered."""

from expertile import cli, cli_cache, cli_watch

if "watch" not in {command.callback.__name__ for command in cli.app.registered_commands}:
    cli.app.command(context_settings=cli_watch.SETTINGS)(cli_watch.watch)
if "cache" not in {group.name for group in cli.app.registered_groups}:
    cli.app.add_typer(cli_cache.app, name="cache")
cli.main()
