"""The operators' calls, `/v1/admin/…`, one module a noun: an act of `postseal.admin`, within one credential's projects.

The tenant is that of the credential. What an operator may reach is decided by `postseal.admin.operator`, in the
transaction of the act.
"""

from postseal.web.admin.audit import AuditCalls
from postseal.web.admin.credentials import CredentialCalls
from postseal.web.admin.dead_letters import DeadLetterCalls
from postseal.web.admin.destinations import DestinationCalls, Outbound
from postseal.web.admin.devices import DeviceCalls
from postseal.web.admin.keys import KeyCalls
from postseal.web.admin.office import Office
from postseal.web.admin.projects import ProjectCalls
from postseal.web.admin.retention import RetentionCalls
from postseal.web.admin.streams import StreamCalls
from postseal.web.calls import Call


def calls(office: Office, outbound: Outbound) -> list[Call]:
    """All of them."""
    nouns = (
        ProjectCalls(office),
        DeviceCalls(office),
        CredentialCalls(office),
        KeyCalls(office),
        StreamCalls(office),
        RetentionCalls(office, outbound.settings.payload_retention_days),
        DestinationCalls(office, outbound),
        DeadLetterCalls(office, outbound.settings.attempt_limit),
        AuditCalls(office),
    )
    return [call for noun in nouns for call in noun.calls()]
