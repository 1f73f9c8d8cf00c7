"""The protocols of environments and policies: the loops accept any class with these members."""

from funcollect.protocols.environments import Backend as Backend
from funcollect.protocols.environments import Column as Column
from funcollect.protocols.environments import Env as Env
from funcollect.protocols.environments import Forking as Forking
from funcollect.protocols.environments import HostEnv as HostEnv
from funcollect.protocols.environments import JaxEnv as JaxEnv
from funcollect.protocols.environments import Outcome as Outcome
from funcollect.protocols.environments import ReplacedSimulators as ReplacedSimulators
from funcollect.protocols.environments import RestartingSimulators as RestartingSimulators
from funcollect.protocols.environments import SavableSnapshots as SavableSnapshots
from funcollect.protocols.environments import Seeding as Seeding
from funcollect.protocols.environments import Simulators as Simulators
from funcollect.protocols.environments import SimulatorsInParts as SimulatorsInParts
from funcollect.protocols.environments import SnapshotSimulators as SnapshotSimulators
from funcollect.protocols.environments import Starts as Starts
from funcollect.protocols.environments import TorchEnv as TorchEnv
from funcollect.protocols.environments import Transition as Transition
from funcollect.protocols.environments import is_env as is_env
from funcollect.protocols.policies import Actor as Actor
from funcollect.protocols.policies import ActorInputs as ActorInputs
from funcollect.protocols.policies import BoundParams as BoundParams
from funcollect.protocols.policies import Columns as Columns
from funcollect.protocols.policies import Exploration as Exploration
from funcollect.protocols.policies import Policy as Policy
from funcollect.protocols.policies import is_policy as is_policy
from funcollect.protocols.policies import traced_values as traced_values
