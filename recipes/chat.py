"""Base and aligned model answer side by side.

    python recipes/chat.py --run runs/mine
    python recipes/chat.py --run runs/mine --rollout.temperature 0.3 --show_rewards false
    python recipes/chat.py --adapter FOLDER --policy.path FOLDER
    echo "How do I clean my oven?" | python recipes/chat.py --run runs/mine

Each side goes on with its own dialogue: your turns are the same, the replies before them are its
own. Both sample on the same noise. /reset begins both dialogues anew, /quit or the end of the
input leaves.
"""

from firm.cli.main import run

if __name__ == "__main__":
    run("chat", description=__doc__ or "")
