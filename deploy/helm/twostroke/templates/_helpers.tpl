{{- define "twostroke.labels" -}}
{{ include "twostroke.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "twostroke.selector" -}}
app.kubernetes.io/name: twostroke
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* Pods of attention workers have another name than those that clients reach. */}}
{{- define "twostroke.attentionLabels" -}}
{{ include "twostroke.attentionSelector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "twostroke.attentionSelector" -}}
app.kubernetes.io/name: twostroke-attention
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "twostroke.image" -}}
image: {{ .Values.image.repository }}:{{ .Values.image.tag | default .Values.device }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "twostroke.confined" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- /* The user's settings, and those of pods that serve each other's clients. */}}
{{- define "twostroke.settings" -}}
{{- range $key, $value := .Values.settings }}
- --set
- {{ printf "%s=%s" $key (kindIs "string" $value | ternary (toString $value) (toJson $value)) | quote }}
{{- end }}
{{- if .Values.peers.secret }}
- --set
- peers.tls_certificate=/run/secrets/peers/tls.crt
- --set
- peers.tls_key=/run/secrets/peers/tls.key
- --set
- peers.tls_ca=/run/secrets/peers/ca.crt
- --set
- peers.tls_server_name={{ .Release.Name }}-dense
{{- end }}
{{- end }}

{{- /* Asks a service, at the address of the list's second element; the third says whether it wants the peers' TLS. */}}
{{- define "twostroke.ask" -}}
{{- $root := index . 0 -}}
command:
  - python
  - -m
  - services.rpc.probe
  - --address
  - {{ index . 1 }}
  - --service
  - liveness
  - --timeout-ms
  - "4000"
  {{- if and (index . 2) $root.Values.peers.secret }}
  - --tls-ca-cert
  - /run/secrets/peers/ca.crt
  - --tls-client-cert
  - /run/secrets/peers/tls.crt
  - --tls-client-key
  - /run/secrets/peers/tls.key
  - --tls-server-name
  - {{ $root.Release.Name }}-dense
  {{- end }}
{{- end }}

{{- /* A service may load weights for minutes. Meanwhile the gateway is not ready, but the worker is alive. */}}
{{- define "twostroke.startup" -}}
startupProbe:
  exec: {{- include "twostroke.ask" . | nindent 4 }}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 150
{{- end }}

{{- /* Where workers meet: the root context, a volume and where it is mounted. Pods of a set share it on their node. */}}
{{- define "twostroke.meeting" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.attentionPods.count -}}
- name: {{ index . 1 }}
  mountPath: {{ index . 2 }}
  subPathExpr: {{ $root.Release.Name }}-$(POD_NAMESPACE)-{{ index . 1 }}
{{- else -}}
- {name: {{ index . 1 }}, mountPath: {{ index . 2 }}}
{{- end }}
{{- end }}

{{- define "twostroke.meetingVolumes" -}}
- {name: run, hostPath: {path: /dev/shm, type: Directory}}
- {name: shm, hostPath: {path: /dev/shm, type: Directory}}
{{- end }}

{{- define "twostroke.namespace" -}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
{{- end }}
