"""Print the oldest versions that setup.cfg allows, as constraints for pip."""

import configparser
from pathlib import Path

config = configparser.ConfigParser()
config.read(Path(__file__).parents[1] / "setup.cfg")
print(config["options"]["install_requires"].strip().replace(">=", "=="))
print("pyparsing<3.2")  # later ones warn of what the oldest matplotlib calls, and in the suite warnings are errors
